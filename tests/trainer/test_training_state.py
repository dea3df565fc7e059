"""Tests how the state of a training run is written as bytes, and that damage is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.checkpoints import same, trained_state

from torchft_svc.errors import CheckpointError, ConfigError
from torchft_svc.trainer.messages import Position
from torchft_svc.trainer.state import (
    TrainingState,
    check_fits,
    copy_to_host,
    decode_state,
    encode_state,
)


def test_a_state_comes_back_to_the_last_bit() -> None:
    state = trained_state(step=13)
    assert same(decode_state(encode_state(state), "here"), state)


def test_a_state_that_was_read_can_be_trained_on() -> None:
    state = decode_state(encode_state(trained_state(step=3)), "here")
    for tensor in state.parts["model"].values():
        tensor.add_(1)


def test_a_state_without_tensors_comes_back() -> None:
    state = TrainingState(position=Position(step=4), parts={"mine": {"lines": 7}})
    assert decode_state(encode_state(state), "here") == state


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:10],
        lambda data: data[:-1],
        lambda data: data + b"?",
        lambda data: b"?" + data[1:],
        lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
    ],
)
def test_damaged_bytes_are_refused(damage: Callable[[bytes], bytes]) -> None:
    data = encode_state(trained_state(step=1))
    with pytest.raises(CheckpointError, match="checkpoint from there"):
        decode_state(damage(data), "there")


def test_a_value_that_cannot_be_stored_is_named() -> None:
    state = TrainingState(position=Position(), parts={"mine": {"rule": lambda: 1}})
    with pytest.raises(ConfigError, match=r"\['parts'\]\['mine'\]\['rule'\]"):
        encode_state(state)


def test_a_copy_does_not_change_while_training_goes_on() -> None:
    weight = torch.zeros(3)
    state = TrainingState(position=Position(), parts={"model": {"a": weight, "b": weight}})
    copy = copy_to_host(state)
    weight.add_(1)
    assert copy.parts["model"]["a"].tolist() == [0, 0, 0]
    assert copy.parts["model"]["a"] is copy.parts["model"]["b"]


def test_a_copy_has_all_parts_as_they_were() -> None:
    state = trained_state(step=3)  # with a MultiStepLR, whose milestones are a Counter
    assert same(copy_to_host(state), state)


def test_a_state_of_another_model_is_refused_with_the_differences() -> None:
    model = torch.nn.Linear(2, 3)
    found = {"weight": torch.zeros(3, 4), "scale": torch.zeros(1)}
    with pytest.raises(ConfigError) as caught:
        check_fits(found, model)
    message = str(caught.value)
    assert "bias is missing" in message
    assert "the model has no scale" in message
    assert "weight is [3, 4], the model's is [3, 2]" in message


def test_a_state_of_the_model_is_accepted() -> None:
    model = torch.nn.BatchNorm1d(2)
    check_fits(model.state_dict(), model)
