"""Weights that are written back are those that were read."""

from __future__ import annotations

import numpy as np
import pytest

from inferlib.checkpoint.safetensors import SafetensorsSource
from inferlib.checkpoint.save import save_model
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import abstract_model
from inferlib.models.quantization import Quantization


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_a_saved_model_has_the_tensors_that_were_read(family, checkpoint, tmp_path):
    files = ModelFiles.open(checkpoint(family))
    model = abstract_model(files.config, "float32")
    save_model(tmp_path, files.hf, model, files.load(model))
    saved = ModelFiles.open(tmp_path)
    assert saved.hf == files.hf
    source, written = SafetensorsSource(files.path), SafetensorsSource(tmp_path)
    assert set(written.names()) <= set(source.names())
    for name in written.names():
        np.testing.assert_array_equal(np.asarray(written.read(name)), np.asarray(source.read(name)))
    for read, again in zip(files.load(model), saved.load(model), strict=True):
        np.testing.assert_array_equal(read, again)


FORMS = [{"scan": True}, {"quantization": Quantization.named("int8")}]


@pytest.mark.parametrize("options", FORMS, ids=["scan", "int8"])
def test_other_forms_are_refused(options, checkpoint, tmp_path):
    files = ModelFiles.open(checkpoint("llama"))
    with pytest.raises(ValueError, match="give abstract_model no scan"):
        save_model(tmp_path, files.hf, abstract_model(files.config, "float32", **options), ())
