"""The identity of a model's attention weights, so that a calibrated plan refuses another model."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch

from kvrs.errors import PlanError

if TYPE_CHECKING:
    import kvrs

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
ENDS = 64
"""Values from each end of a weight that count."""


def fingerprint(model: Any) -> str:
    """Return SHA-256 over a model's shape and the ends of its attention weights, as 64 hex digits.

    Weights are rounded to bfloat16, so that a model has one identity in every type it may be loaded in.

    Parameters
    ----------
    model : PreTrainedModel
        With separate projections in its attention modules.

    Raises
    ------
    kvrs.PlanError
        If an attention module has no such projections.
    """
    from kvrs.hf.shapes import shape_from_config
    from kvrs.hf.support import attention_modules

    digest = hashlib.sha256(json.dumps(shape_from_config(model.config).spec(), sort_keys=True).encode())
    for layer, module in enumerate(attention_modules(model)):
        for name in PROJECTIONS:
            weight = getattr(getattr(module, name, None), "weight", None)
            if weight is None:
                raise PlanError(
                    f"layer {layer} of model {type(model).__name__} has no {name}.weight; allowed in "
                    "calibration: "
                    f"attention with {', '.join(PROJECTIONS)}"
                )
            flat = weight.detach().flatten()
            ends = torch.cat([flat[:ENDS], flat[-ENDS:]]).to("cpu", torch.bfloat16)
            digest.update(ends.view(torch.int16).numpy().astype("<i2").tobytes())
    return digest.hexdigest()


def check(model: Any, plan: kvrs.Plan) -> None:
    """Refuse a model that a calibrated plan was not made for; other plans fit any.

    Parameters
    ----------
    model : PreTrainedModel
        That is to use the plan.
    plan : kvrs.Plan
        With or without a calibration.

    Raises
    ------
    kvrs.PlanError
        Naming both identities.
    """
    calibration = getattr(plan, "calibration", None)
    if calibration is None or not calibration.fingerprint:
        return
    found = fingerprint(model)
    if found != calibration.fingerprint:
        raise PlanError(
            f"model has the fingerprint {found[:12]}; allowed: {calibration.fingerprint[:12]}, that of the "
            f"model that the plan ({plan.name or 'without a name'}) was calibrated on"
        )
