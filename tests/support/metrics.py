"""Reads the pages of metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


class Page:
    """The samples of a page of metrics."""

    def __init__(self, text: bytes) -> None:
        self.families = list(text_string_to_metric_families(text.decode()))
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        """The value of the sample with exactly these labels; KeyError: there is none."""
        return self.samples[name, frozenset(labels.items())]

    def names(self) -> set[str]:
        """The names of all samples."""
        return {name for name, _ in self.samples}
