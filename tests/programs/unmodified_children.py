"""A program whose children print whether they were started by tfswap's startup module."""

import multiprocessing
import subprocess
import sys

STARTED = "import sys; print('tfswap_startup' in sys.modules, flush=True)"


def child() -> None:
    exec(STARTED)


if __name__ == "__main__":
    subprocess.run([sys.executable, "-c", STARTED], check=True)
    for how in ("spawn", "fork"):
        process = multiprocessing.get_context(how).Process(target=child)
        process.start()
        process.join()
