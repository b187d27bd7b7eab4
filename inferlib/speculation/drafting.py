"""What programs may draft by: a model, an EAGLE-3 head, or a model's own layer for further tokens."""

from __future__ import annotations

from typing import TypeAlias

from inferlib.models.abstract import AbstractModel
from inferlib.models.eagle3 import AbstractHead
from inferlib.models.mtp import AbstractMtp
from inferlib.models.recurrent import keeps_state
from inferlib.ops.backend import Backend
from inferlib.speculation.draft_model import DraftModel
from inferlib.speculation.drafter import ModelDrafter
from inferlib.speculation.eagle3 import Eagle3Drafter
from inferlib.speculation.mtp import MtpDrafter
from inferlib.speculation.recurrent_draft import RecurrentDraftModel

Drafting: TypeAlias = AbstractModel | AbstractHead | AbstractMtp


def model_of(drafting: Drafting) -> AbstractModel:
    """Its weights and layers, as of any model."""
    return drafting if isinstance(drafting, AbstractModel) else drafting.model


def drafter_of(drafting: Drafting, backend: Backend) -> ModelDrafter:
    """What drafts by it, with these kernels."""
    match drafting:
        case AbstractHead():
            return Eagle3Drafter(backend, drafting)
        case AbstractMtp():
            return MtpDrafter(backend, drafting)
        case _:
            states = any(keeps_state(layer.attention) for layer in drafting.config.layers)
            return (RecurrentDraftModel if states else DraftModel)(drafting, backend)
