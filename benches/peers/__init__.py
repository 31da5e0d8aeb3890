"""Every form of a decode step that is measured: torch, transformers' caches, ggml, and kvrs."""

from __future__ import annotations

from benches.inputs import Case
from benches.peers import ggml, store, torch_forms, transformers_caches
from benches.peers.builder import Builder, MissingPeerError
from benches.timing import Form

FAMILIES: dict[str, dict[str, Builder]] = {
    "torch": torch_forms.FORMS,
    "transformers": transformers_caches.FORMS,
    "ggml": ggml.FORMS,
    "kvrs": store.FORMS,
}
"""What builds each form, by the form's name, in the order of the table."""


def all_forms() -> dict[str, Builder]:
    """Return what builds each form, of all families."""
    return {name: builder for forms in FAMILIES.values() for name, builder in forms.items()}


def build(case: Case, builders: dict[str, Builder]) -> tuple[list[Form], dict[str, str]]:
    """Return the forms that run here, their answers checked, and why the others do not.

    Raises
    ------
    RuntimeError
        If a form's answer is not attention.
    """
    forms, missing = [], {}
    for name, builder in builders.items():
        try:
            form = builder(case)
        except MissingPeerError as reason:
            missing[name] = str(reason)
            continue
        error = case.error(form.step())
        form.restore()
        if not error <= form.tolerance:
            raise RuntimeError(f"{name} has a relative error of {error:.3g}; allowed: {form.tolerance}")
        form.facts["error"] = error
        forms.append(form)
    return forms, missing
