"""Presets of KerasHub in the scope of a strategy, from folders that `save_pretrained` wrote."""

from pathlib import Path

import numpy as np
import pytest

import replicax as rx

pytestmark = pytest.mark.foreign

GOLDEN = Path(__file__).parents[1] / "golden" / "weights"


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_logits_of_kerashub_equal_torchs(name):
    hub = pytest.importorskip("keras_hub")
    golden = np.load(GOLDEN / name / "golden.npz")
    tokens = golden["tokens"]
    kind = {"gpt2": hub.models.GPT2Backbone, "llama": hub.models.LlamaBackbone}[name]
    with rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        backbone = kind.from_preset(str(GOLDEN / name))

    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    hidden = backbone.predict(inputs, verbose=0)

    logits = backbone.token_embedding(hidden, reverse=True)
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-5, rtol=1e-5)
