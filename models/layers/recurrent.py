"""The layer of each kind of `inferlib.models.recurrent`."""

from __future__ import annotations

from inferlib.models.layers.gated_delta import GatedDelta
from inferlib.models.layers.kimi_delta import KimiDelta
from inferlib.models.layers.lightning import Lightning
from inferlib.models.layers.mamba2 import Mamba2
from inferlib.models.layers.short_conv import ShortConv
from inferlib.models.recurrent import GatedDeltaSpec, KimiDeltaSpec, LightningSpec, Mamba2Spec, ShortConvSpec

LAYERS = {
    GatedDeltaSpec: GatedDelta,
    Mamba2Spec: Mamba2,
    ShortConvSpec: ShortConv,
    LightningSpec: Lightning,
    KimiDeltaSpec: KimiDelta,
}
