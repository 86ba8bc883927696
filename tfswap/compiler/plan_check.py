"""Whether an earlier plan may be used: it is of the same graph, and needs nothing that the options rule out."""

from __future__ import annotations

from tfswap.analysis.reduced_precision import precision_of
from tfswap.compiler.options import Options
from tfswap.errors import InvalidModel
from tfswap.ir.permits import CLOSE, SLICE, STATE
from tfswap.plan.plan import Plan
from tfswap.support.sizes import format_bytes


def require_allowed(plan: Plan, fingerprint: str, options: Options) -> None:
    """Raise InvalidModel where `plan` is of another graph than `fingerprint` is, or needs what `options` rule out."""
    if plan.fingerprint != fingerprint:
        raise InvalidModel(
            "this plan was made for another graph (its fingerprint differs): plan again for this one, or "
            "load the plan that was made for it"
        )
    _require_tactics(plan, options)
    _require_precision(plan, options)
    _require_room(plan, options)


def _require_tactics(plan: Plan, options: Options) -> None:
    parts = (plan, *plan.inside)
    if (plan.accumulators or any(p.evictions for p in parts)) and "swap" not in options.tactics:
        raise InvalidModel('this plan swaps, and tactics leaves "swap" out: allow it, or plan again')
    if plan.sliced and SLICE not in options.tactics:
        raise InvalidModel(f'this plan slices kernels, and tactics leaves "{SLICE}" out: allow it, or plan again')
    if any(slices.close for slices in plan.sliced) and options.values != CLOSE:
        raise InvalidModel(
            f'this plan adds in another order, and values is "{options.values}": give values="{CLOSE}", or plan again'
        )
    if plan.at_home and STATE not in options.tactics:
        raise InvalidModel(
            f'this plan keeps variables in host memory, and tactics leaves "{STATE}" out: allow it, or plan again'
        )
    recomputes = plan.recomputed or any(len(p.order) > len(set(p.order)) for p in parts)
    if recomputes and "recompute" not in options.tactics:
        raise InvalidModel('this plan recomputes, and tactics leaves "recompute" out: allow it, or plan again')
    own_ops = (
        plan.splits
        or plan.exact_chunks
        or plan.paired
        or plan.accumulators
        or plan.recomputed
        or plan.inside
        or plan.reduced
    )
    if options.portable and own_ops:
        raise InvalidModel(
            "this plan takes ops of tfswap's, and a portable model has none: plan again for a portable one"
        )
    if (plan.packed or (plan.encoded and not plan.reduced)) and "encode" not in options.tactics:
        raise InvalidModel('this plan encodes, and tactics leaves "encode" out: allow it, or plan again')


def _require_precision(plan: Plan, options: Options) -> None:
    for reduction in plan.reduced:
        node = reduction.tensor.rpartition(":")[0]
        if precision_of(node, options.precision) != reduction.precision:
            raise InvalidModel(
                f"this plan keeps {reduction.tensor!r} as {reduction.precision} for the backward pass, and "
                f"precision does not request that: give precision={{{node!r}: {reduction.precision!r}}}, or plan "
                "again"
            )


def _require_room(plan: Plan, options: Options) -> None:
    host = options.host_limit_bytes
    if host is not None and plan.host_bytes > host:
        raise InvalidModel(
            f"this plan takes {format_bytes(plan.host_bytes)} of host memory, and host_memory_limit is "
            f"{format_bytes(host)}: allow it more, or plan again"
        )
    disk, spill = plan.disk_bytes, options.spill
    if spill is None and (disk or plan.on_disk or any(a.disk for a in plan.evictions)):
        raise InvalidModel("this plan puts tensors on disk, and spill_dir is not given: give it, or plan again")
    if spill is not None and spill.limit_bytes is not None and disk > spill.limit_bytes:
        raise InvalidModel(
            f"this plan puts {format_bytes(disk)} on disk, and spill_limit is {format_bytes(spill.limit_bytes)}: "
            "allow it more, or plan again"
        )
