"""Tests what the demo trains, on which text, and by which fingerprint it compares."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tools.demo.fingerprint import fingerprint
from tools.demo.model import MODEL_SIZES, CharTransformer
from tools.demo.text import VOCABULARY, Corpus, Windows


class TestText:
    def corpus(self, folder: Path) -> Corpus:
        (folder / "b.py").write_bytes(b"second\x00\xff\n")
        (folder / "a.py").write_bytes(b"first ~\n" * 20)
        return Corpus(folder)

    def test_files_follow_their_names_and_every_byte_is_one_token(self, tmp_path: Path) -> None:
        tokens = self.corpus(tmp_path).tokens
        newline, space, tilde, other = 0, 1, 95, 96
        assert tokens[:8].tolist() == [71, 74, 83, 84, 85, space, tilde, newline]
        assert tokens[-3:].tolist() == [other, other, newline]
        assert int(tokens.max()) < VOCABULARY

    def test_targets_are_the_next_characters(self, tmp_path: Path) -> None:
        corpus = self.corpus(tmp_path)
        windows = Windows(corpus, 16)
        assert len(windows) == 10  # of 169 characters
        for index in range(len(windows)):
            inputs, targets = windows[index]
            assert inputs.shape == targets.shape == (16,)
            assert torch.equal(inputs, corpus.tokens[16 * index : 16 * index + 16])
            assert torch.equal(targets, corpus.tokens[16 * index + 1 : 16 * index + 17])

    def test_an_empty_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="no Python sources"):
            Corpus(tmp_path)

    def test_the_standard_library_is_long_enough_for_a_minute(self) -> None:
        assert len(Corpus().tokens) > 2_000_000


class TestModel:
    @pytest.mark.parametrize("name", sorted(MODEL_SIZES))
    def test_logits_for_every_character(self, name: str) -> None:
        size = MODEL_SIZES[name]
        model = CharTransformer(size, VOCABULARY)
        tokens = torch.zeros((2, size.context), dtype=torch.int64)
        assert model(tokens).shape == (2, size.context, VOCABULARY)

    def test_it_does_not_see_the_future(self) -> None:
        torch.manual_seed(0)
        model = CharTransformer(MODEL_SIZES["tiny"], VOCABULARY)
        tokens = torch.randint(VOCABULARY, (1, 32))
        other = tokens.clone()
        other[0, 20:] = 5
        before, after = model(tokens), model(other)
        assert torch.allclose(before[0, :20], after[0, :20])
        assert not torch.allclose(before[0, 20:], after[0, 20:])

    def test_the_usual_size_is_one_that_trains_in_a_minute(self) -> None:
        model = CharTransformer(MODEL_SIZES["small"], VOCABULARY)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        assert 500_000 < num_parameters < 2_000_000


def trained(num_steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    return model, optimizer


class TestFingerprint:
    def of(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
        return fingerprint(model.state_dict(), optimizer.state_dict())

    def test_equal_states_have_one_fingerprint(self) -> None:
        assert self.of(*trained()) == self.of(*trained())

    def test_one_bit_of_a_parameter_changes_it(self) -> None:
        model, optimizer = trained()
        before = self.of(model, optimizer)
        bits = model.weight.data.view(torch.int32)  # type: ignore[operator,union-attr]
        bits[1, 2] ^= 1
        assert self.of(model, optimizer) != before

    def test_one_bit_of_the_optimizer_changes_it(self) -> None:
        model, optimizer = trained()
        before = self.of(model, optimizer)
        bits = optimizer.state[model.weight]["exp_avg_sq"].view(torch.int32)
        bits[0, 0] ^= 1
        assert self.of(model, optimizer) != before

    def test_the_optimizer_step_and_learning_rate_count(self) -> None:
        model, optimizer = trained()
        before = self.of(model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.5
        assert self.of(model, optimizer) != before
        assert self.of(*trained(2)) != before

    def test_a_zero_has_a_sign_and_a_tensor_a_shape_and_a_dtype(self) -> None:
        zero = torch.zeros(2)
        others = [-zero, zero.reshape(2, 1), zero.to(torch.int32), zero[:1], [zero], (0.0, 0.0)]
        assert fingerprint(zero) not in {fingerprint(other) for other in others}

    def test_layout_in_memory_does_not_count(self) -> None:
        table = torch.arange(6.0).reshape(2, 3)
        assert fingerprint(table.T) == fingerprint(table.T.contiguous())
