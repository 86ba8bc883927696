"""Figures of other systems as their papers have them. Nothing of these ran here.

What abstracts say was held against copies of them; what a paper's tables say was not, and is set down only where an
abstract bears part of it out.
"""

from __future__ import annotations

from papers.harness.page import Table

DEPTHS = {"Caffe": 148, "Torch": 152, "MXNet": 480, "TensorFlow": 592, "SuperNeurons": 1920}
"""Layers of the deepest ResNet, with a batch of 16 in the 12 GB of a K40c."""

ABSTRACTS = (
    (
        "SuperNeurons (Wang et al., PPoPP 2018)",
        "abstract",
        "networks at least 3.2432 times deeper than with Caffe, Torch, MXNet and TensorFlow; ResNet2500, of 10^4 basic "
        "layers, on a K40c of 12 GB",
    ),
    (
        "GeePS (Cui et al., EuroSys 2016)",
        "abstract",
        "13 times as many images a second on 16 machines as the single-node code on one; on four GPU machines a higher "
        "throughput than a CPU-only system on 108",
    ),
    (
        "vDNN (Rhu et al., MICRO 2016)",
        "abstract",
        "average use of GPU memory down by up to 89% (AlexNet), 91% (OverFeat) and 95% (GoogLeNet); VGG-16 with a "
        "batch of 256, which needs 28 GB, on a Titan X of 12 GB at 18% less speed than with enough memory",
    ),
)

HEAD = """# As published

Caffe, Torch, MXNet, GeePS, SuperNeurons and vDNN, as their papers quote them: **nothing of this ran here**, and their
GPUs, kernels and nets are others than this page's. What abstracts say was held against copies of them. Of the papers'
tables there was none: of the depths only the least ratio is confirmed, by an abstract, and SuperNeurons' largest
batches and what GeePS says of memory aren't quoted.
"""


def tables() -> list[Table]:
    """What papers say of other systems."""
    ours = DEPTHS["SuperNeurons"]
    depths = [[name, str(layers), f"{ours / layers:.1f}" if layers < ours else ""] for name, layers in DEPTHS.items()]
    title = "Deepest ResNet, batch 16, a K40c of 12 GB (SuperNeurons' table of depths):"
    return [
        Table(title, ("framework", "layers", "SuperNeurons over it"), depths),
        Table("What their abstracts say:", ("system", "where", "figure"), ABSTRACTS),
    ]
