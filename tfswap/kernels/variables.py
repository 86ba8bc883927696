"""Reads and updates of variables. A read shares the variable's buffer."""

from __future__ import annotations

from tfswap.kernels.memory_rules import VIEW, Entry, KernelMemory, Rule, alias_each, nothing
from tfswap.kernels.temporaries import Facts


def writes_first(facts: Facts) -> KernelMemory:
    """Writes over the first input even if others hold it (inplace_ops.cc, assign_op.h, dense_update_ops.cc)."""
    return KernelMemory(alias=((0, 0),), writes=True)


def assign(facts: Facts) -> KernelMemory:
    """resource_variable_ops.cc: the variable adopts the value's buffer and frees its own."""
    return KernelMemory(retains=(1,))


def update(*resources: int) -> Rule:
    """training_ops.cc, resource_variable_ops.cc: the variables at these inputs are updated in place."""

    def rule(facts: Facts) -> KernelMemory:
        return KernelMemory(updates=resources)

    return rule


IN_PLACE = Entry(writes_first)

RULES: dict[str, Entry] = {
    "Assign": IN_PLACE,
    "AssignAdd": IN_PLACE,
    "AssignSub": IN_PLACE,
    "InplaceAdd": IN_PLACE,
    "InplaceSub": IN_PLACE,
    "InplaceUpdate": IN_PLACE,
    "AssignVariableOp": Entry(assign),
    "ReadVariableOp": VIEW,
    "_ReadVariablesOp": Entry(alias_each),
    "DisableCopyOnRead": Entry(nothing),
    "AssignAddVariableOp": Entry(update(0)),
    "AssignSubVariableOp": Entry(update(0)),
    "ResourceScatterAdd": Entry(update(0)),
    "ResourceScatterDiv": Entry(update(0)),
    "ResourceScatterMax": Entry(update(0)),
    "ResourceScatterMin": Entry(update(0)),
    "ResourceScatterMul": Entry(update(0)),
    "ResourceScatterSub": Entry(update(0)),
    "ResourceScatterUpdate": Entry(update(0)),
    "ResourceScatterNdAdd": Entry(update(0)),
    "ResourceScatterNdMax": Entry(update(0)),
    "ResourceScatterNdMin": Entry(update(0)),
    "ResourceScatterNdSub": Entry(update(0)),
    "ResourceScatterNdUpdate": Entry(update(0)),
    "ResourceSparseApplyProximalGradientDescent": Entry(update(0)),
    "ResourceApplyGradientDescent": Entry(update(0)),
    "ResourceApplyProximalGradientDescent": Entry(update(0)),
    "ResourceStridedSliceAssign": Entry(update(0)),
    "ResourceApplyMomentum": Entry(update(0, 1)),
    "ResourceApplyKerasMomentum": Entry(update(0, 1)),
    "ResourceSparseApplyMomentum": Entry(update(0, 1)),
    "ResourceSparseApplyKerasMomentum": Entry(update(0, 1)),
    "ResourceApplyAdagrad": Entry(update(0, 1)),
    "ResourceApplyAdagradV2": Entry(update(0, 1)),
    "ResourceSparseApplyAdagrad": Entry(update(0, 1)),
    "ResourceSparseApplyProximalAdagrad": Entry(update(0, 1)),
    "ResourceSparseApplyAdagradV2": Entry(update(0, 1)),
    "ResourceApplyAddSign": Entry(update(0, 1)),
    "ResourceApplyPowerSign": Entry(update(0, 1)),
    "ResourceApplyAdam": Entry(update(0, 1, 2)),
    "ResourceApplyAdaMax": Entry(update(0, 1, 2)),
    "ResourceApplyAdadelta": Entry(update(0, 1, 2)),
    "ResourceApplyFtrl": Entry(update(0, 1, 2)),
    "ResourceApplyFtrlV2": Entry(update(0, 1, 2)),
    "ResourceApplyRMSProp": Entry(update(0, 1, 2)),
    "ResourceSparseApplyFtrl": Entry(update(0, 1, 2)),
    "ResourceSparseApplyFtrlV2": Entry(update(0, 1, 2)),
    "ResourceSparseApplyRMSProp": Entry(update(0, 1, 2)),
    "ResourceSparseApplyAdadelta": Entry(update(0, 1, 2)),
    "ResourceApplyAdamWithAmsgrad": Entry(update(0, 1, 2, 3)),
    "ResourceApplyCenteredRMSProp": Entry(update(0, 1, 2, 3)),
    "ResourceSparseApplyCenteredRMSProp": Entry(update(0, 1, 2, 3)),
}
