"""Which experts to profile: a known shape, a config.json, a model folder, or plain numbers."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from hetero.core import ExpertSpec, InputError
from hetero.report.schema import Shape

_NUMBERS = re.compile(r"^(\d+)x(\d+)x(\d+)x(\d+)(?:x(\d+))?$")


def find_shape(text: str) -> tuple[Shape, ExpertSpec]:
    """``HIDDENxINTERMEDIATExEXPERTSxTOPK[xLAYERS]``, a shipped name, a config.json or a folder with one.

    Raises InputError for what is none of these, and for a model without routed experts.
    """
    if match := _NUMBERS.match(text):
        hidden, intermediate, experts, top_k, layers = (int(n) for n in match.groups(default="1"))
        if min(hidden, intermediate, experts, top_k, layers) < 1 or top_k > experts:
            raise InputError(f"--shapes {text}: numbers must be at least 1, and top-k at most the experts")
        return _shape(text, ExpertSpec(experts, hidden, intermediate, top_k), layers)

    from hetero.model.shapes import SYNTHETIC, resolve_model, shape_names

    path = Path(text)
    if not text.startswith(SYNTHETIC) and (text in shape_names() or not path.exists()):
        text = SYNTHETIC + text
    try:
        ref = resolve_model(text)
    except InputError as error:
        raise InputError(
            f"--shapes: {error}, or numbers such as 2560x640x512x10 (hidden, intermediate, experts, top-k)"
        ) from None

    from hetero.model.build import build_meta, describe, load_config

    modules = describe(build_meta(load_config(ref.config)))
    specs = Counter(m.experts for m in modules if m.experts is not None)
    if not specs:
        raise InputError(f"--shapes: {ref.name} ({ref.model_type}) has no routed experts")
    spec, _ = specs.most_common(1)[0]
    return _shape(ref.name, spec, sum(specs.values()))


def _shape(name: str, spec: ExpertSpec, layers: int) -> tuple[Shape, ExpertSpec]:
    shape = Shape(
        name=name,
        hidden=spec.hidden,
        intermediate=spec.intermediate,
        experts=spec.num_experts,
        top_k=spec.top_k,
        layers=layers,
        has_gate=spec.has_gate,
        has_bias=spec.has_bias,
    )
    return shape, spec
