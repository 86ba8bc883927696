"""Makes the pictures of the documentation, by tfswap's own reports:

    python docs/plots.py

Needs the extras "cpu" and "plot", and a headless chromium for the picture of the page.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
IMAGES = HERE / "images"
ARENA = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "3000", "TF_ENABLE_ONEDNN_OPTS": "0"}
BATCH, SIZE, LIMIT = 32, 64, "60%"


def main() -> int:
    os.environ.update(ARENA)  # before TensorFlow is imported
    sys.path.insert(0, str(HERE.parent / "examples"))
    from train_under_cap import build_step

    import tfswap

    IMAGES.mkdir(exist_ok=True)
    step, arguments = build_step(BATCH, SIZE)
    optimized = tfswap.optimize(step, memory_limit=LIMIT)
    for _ in range(2):
        optimized(*arguments)
    report = optimized.report()
    print(report.headline())
    report.save(IMAGES / "memory.png")
    tfswap.simulate(step, *arguments).save_png(IMAGES / "curve.png")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("no chromium: images/report.png stays what it is")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        report.save(page)
        shot = f"--screenshot={IMAGES / 'report.png'}"
        command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1120,1480", shot]
        subprocess.run([*command, page.as_uri()], check=True, stderr=subprocess.DEVNULL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
