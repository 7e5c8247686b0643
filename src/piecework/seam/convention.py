"""What AOTAutograd's wrapper would do around a compiled graph; ours has no wrapper, so there must be nothing to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from piecework.seam.strip import StrippedText
from piecework.seam.vocabulary import Refusal


def wrapper_work(metadata: Any) -> str:
    """Say what the graph alone leaves undone; empty if nothing."""
    subclasses = [m for m in metadata.subclass_inp_meta if type(m).__name__ == "SubclassCreationMeta"]
    found = {
        "it writes to inputs after the graph": metadata.mutated_inp_runtime_indices,
        "it returns views of tensors inside": metadata.num_intermediate_bases,
        "it threads effect tokens": metadata.tokens,
        "its random numbers are functionalised": metadata.is_rng_op_functionalized,
        "it switches gradients": metadata.grad_enabled_mutation is not None,
        "it takes tensor subclasses": subclasses,
        "it awaits collectives": getattr(metadata, "act_input_indices", ()),
    }
    return next((reason for reason, present in found.items() if present), "")


def check_convention(names: Sequence[str], metadata: Any, stripped: StrippedText) -> None:
    """Refuse a piece whose results the output code alone does not give; `names` are its inputs in order."""
    work = wrapper_work(metadata)
    if work:
        raise Refusal(f"the piece needs AOTAutograd's wrapper: {work}")
    if len(stripped.returns) != len(metadata.output_info):
        raise Refusal(f"output code returns {len(stripped.returns)} values for {len(metadata.output_info)} outputs")
    for index, output in enumerate(metadata.output_info):
        if output.output_type.name in ("alias_of_input", "is_input"):
            base = names[output.base_idx]
            if not _is_view_of(stripped.returns[index], base, stripped.text):
                raise Refusal(f"output {index} is a view of `{base}`, which the output code copies")


def _is_view_of(expression: str, base: str, text: str) -> bool:
    """Tell whether a returned expression is `base` or views made of it."""
    seen: set[str] = set()
    while expression not in seen:
        seen.add(expression)
        if expression == base:
            return True
        if match := re.match(r"(?:reinterpret_tensor|copy_if_misaligned)\((\w+),", expression):
            expression = match.group(1)
        elif match := re.search(rf"^ +{re.escape(expression)} = (.*)$", text, re.MULTILINE):
            expression = match.group(1)
    return False
