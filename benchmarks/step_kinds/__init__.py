"""Training steps of many kinds, small enough to be measured in seconds."""

from __future__ import annotations

import importlib
from typing import Any

KINDS: dict[str, tuple[str, ...]] = {
    "images": (
        "gan",
        "wgan_gp",
        "vit",
        "capsule",
        "deeplab",
        "contrastive",
        "fakequant",
        "mixed_fp16",
        "diffusion",
        "vqvae",
        "espcn",
        "triplet",
        "rcnn_head",
        "augment",
        "distill",
    ),
    "sequences": (
        "ctc_asr",
        "bilstm_mask",
        "scan_ssm",
        "wavenet",
        "stft_loss",
        "perceiver",
        "convlstm",
        "moe",
        "unique_embed",
        "gat",
        "pointnet",
    ),
    "derivatives": (
        "fno",
        "gp",
        "sam",
        "accum_cond",
        "map_fn_grad",
        "vmap_jac",
        "xla_inner",
        "flow",
        "deq",
        "whitening",
        "recompute_inside",
        "switch_experts",
        "hvp",
        "jvp_forward",
        "sinkhorn",
        "pyfunc",
        "f64_pde",
    ),
}
"""The names of the steps, by module."""


def made(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A step and its arguments."""
    module = next(module for module, names in KINDS.items() if name in names)
    return getattr(importlib.import_module(f"step_kinds.{module}"), name)()
