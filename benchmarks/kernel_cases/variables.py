"""Variables: reads and updates."""

from __future__ import annotations

from typing import Any

from kernel_cases.case import Case, floats, integers, number


def variables_and_lists() -> list[Case]:
    v, g, lr = {"variable": floats(512, 256)}, floats(512, 256), number(0.1)
    types = {"dtype": "float32"}
    return [
        Case("ReadVariableOp", {"resource": v}, types),
        Case("AssignVariableOp", {"resource": v, "value": g}),
        Case("AssignAddVariableOp", {"resource": v, "value": g}),
        Case("AssignSubVariableOp", {"resource": v, "value": g}),
        Case("VariableShape", {"input": v}),
        Case("ResourceApplyGradientDescent", {"var": v, "alpha": lr, "delta": g}),
        Case("ResourceApplyMomentum", {"var": v, "accum": v, "lr": lr, "grad": g, "momentum": lr}),
        Case("ResourceApplyKerasMomentum", {"var": v, "accum": v, "lr": lr, "grad": g, "momentum": lr}),
        Case("ResourceApplyAdagradV2", {"var": v, "accum": v, "lr": lr, "epsilon": lr, "grad": g}),
        Case(
            "ResourceApplyRMSProp",
            {"var": v, "ms": v, "mom": v, "lr": lr, "rho": lr, "momentum": lr, "epsilon": lr, "grad": g},
        ),
        Case(
            "ResourceApplyAdam",
            {
                "var": v,
                "m": v,
                "v": v,
                "beta1_power": lr,
                "beta2_power": lr,
                "lr": lr,
                "beta1": lr,
                "beta2": lr,
                "epsilon": lr,
                "grad": g,
            },
        ),
        Case(
            "ResourceApplyFtrl",
            {
                "var": v,
                "accum": v,
                "linear": v,
                "grad": g,
                "lr": lr,
                "l1": lr,
                "l2": lr,
                "lr_power": number(-0.5),
            },
        ),
        # Tensor lists are not here: what they hold depends on the ops around them (tfswap/analysis/tensor_lists.py),
        # and whole programs show it to the byte (tests/runtime/test_control_flow.py).
    ]


def variables_in_part() -> list[Case]:
    """Each op that turns the copy-on-read mode of its variables on."""
    v, lr, rows = {"variable": floats(512, 256)}, number(0.1), floats(64, 256)
    ids, places = ["int32", [64]], ["int32", [64, 1]]
    types = {"dtype": "float32"}
    start, end, stride = integers([0, 0]), integers([64, 256]), integers([1, 1])
    slots: dict[str, dict[str, Any]] = {
        "Adadelta": {"accum": v, "accum_update": v, "lr": lr, "rho": lr, "epsilon": lr},
        "Adagrad": {"accum": v, "lr": lr},
        "AdagradV2": {"accum": v, "lr": lr, "epsilon": lr},
        "CenteredRMSProp": {
            "mg": v,
            "ms": v,
            "mom": v,
            "lr": lr,
            "rho": lr,
            "momentum": lr,
            "epsilon": lr,
        },
        "Ftrl": {"accum": v, "linear": v, "lr": lr, "l1": lr, "l2": lr, "lr_power": number(-0.5)},
        "FtrlV2": {
            "accum": v,
            "linear": v,
            "lr": lr,
            "l1": lr,
            "l2": lr,
            "l2_shrinkage": lr,
            "lr_power": number(-0.5),
        },
        "KerasMomentum": {"accum": v, "lr": lr, "momentum": lr},
        "Momentum": {"accum": v, "lr": lr, "momentum": lr},
        "ProximalAdagrad": {"accum": v, "lr": lr, "l1": lr, "l2": lr},
        "ProximalGradientDescent": {"alpha": lr, "l1": lr, "l2": lr},
        "RMSProp": {"ms": v, "mom": v, "lr": lr, "rho": lr, "momentum": lr, "epsilon": lr},
    }
    return [
        Case("ResourceGather", {"resource": v, "indices": ids}, types),
        Case("ResourceGatherNd", {"resource": v, "indices": places}, types),
        Case(
            "ResourceStridedSliceAssign",
            {"ref": v, "begin": start, "end": end, "strides": stride, "value": rows},
        ),
        *(
            Case(f"ResourceScatter{how}", {"resource": v, "indices": ids, "updates": rows})
            for how in ("Add", "Div", "Max", "Min", "Mul", "Sub", "Update")
        ),
        *(
            Case(f"ResourceScatterNd{how}", {"ref": v, "indices": places, "updates": rows})
            for how in ("Add", "Max", "Min", "Sub", "Update")
        ),
        *(
            Case(f"ResourceSparseApply{name}", {"var": v, **inputs, "grad": rows, "indices": ids})
            for name, inputs in slots.items()
        ),
    ]
