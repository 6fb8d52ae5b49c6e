"""Configs compared by the models that they describe: floats of files are fp32, and what is derived may be said or not."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from support.gguf_oracle import FAMILIES, expressible, wide
from support.transformers_oracle import CONFIGS, hf_model

from nntask.architecture.rotary import RopeScaling
from nntask.export import Conversion, Convertible, write_gguf
from nntask.hf.model_directory import ModelDirectory
from nntask.models.same_model import differing_keys, is_same_model


@pytest.mark.parametrize("name", FAMILIES)
def test_floats_that_are_fp32_in_files_are_the_same(tmp_path: Path, name: str) -> None:
    """A config with the fp32 values of its floats, and with the head size that follows from others, is the model that the file gives back."""
    plain = wide(expressible(name))
    rounded = {field.name: float(np.float32(value)) for field in fields(plain) if type(value := getattr(plain, field.name)) is float}
    rounded |= {"rope_theta": float(np.float32(10000.1))} if hasattr(plain, "rope_theta") else {}
    rounded |= {"head_dim": plain.head_size} if hasattr(plain, "head_dim") else {"n_inner": plain.inner_size}
    config = replace(plain, **rounded)
    assert any(rounded[key] != getattr(plain, key) for key in rounded)
    hf_model(config).save_pretrained(tmp_path / "model")
    source = Convertible.of(tmp_path / "model", ModelDirectory.open(tmp_path / "model").config, None, None)
    write_gguf(source, tmp_path / "small.gguf", Conversion("f32"))
    assert is_same_model(ModelDirectory.open(tmp_path / "small.gguf").config, config)


def test_what_makes_another_model_is_named_alone() -> None:
    """Of several keys that differ those that change the model; values that are derived or round to the same are not among them."""
    plain = wide(CONFIGS["llama"])
    same = replace(plain, head_dim=plain.head_size, rms_norm_eps=float(np.float32(plain.rms_norm_eps)), num_key_value_heads=plain.n_kv_head)
    assert is_same_model(same, plain)
    assert not is_same_model(replace(same, rms_norm_eps=1.0001e-6), plain)
    assert differing_keys(replace(same, rms_norm_eps=1.0001e-6), plain) == ["rms_norm_eps"]
    assert differing_keys(replace(same, rope_theta=101.0, attention_dropout=0.5), plain) == ["rope_theta"]
    linear = RopeScaling(rope_type="linear", factor=2.0)
    assert not is_same_model(replace(same, rope_scaling=linear), plain)
    assert not is_same_model(replace(same, rope_scaling=RopeScaling(rope_type="dynamic", factor=2.0)), plain)
    yarn = RopeScaling(rope_type="yarn", factor=2.0)
    assert is_same_model(replace(same, rope_scaling=yarn), replace(same, rope_scaling=replace(yarn, beta_fast=32.0, beta_slow=1.0, truncate=True)))


def test_options_of_training_make_no_other_model() -> None:
    """A load-balancing loss is for training only, so a file that cannot say it has the same model."""
    config = CONFIGS["olmoe"]
    balanced = replace(config, output_router_logits=True, router_aux_loss_coef=0.5)
    assert balanced.description.balance == 0.5
    assert is_same_model(balanced, replace(config, output_router_logits=False))
