"""Examines a trainer in the environment that a test gives it."""

from __future__ import annotations

from collections.abc import Sequence

from torchft_svc.doctor.examination import DoctorOptions, Examination
from torchft_svc.doctor.findings import Diagnosis, Level
from torchft_svc.doctor.settings import read_settings
from torchft_svc.env import Environment

NO_OPTIONS = DoctorOptions()


def examine(options: DoctorOptions = NO_OPTIONS, **variables: str) -> list[Diagnosis]:
    """All findings of a trainer that has these variables, and no others."""
    return Examination(read_settings(Environment(variables)), options).make()


def named(findings: Sequence[Diagnosis], check: str) -> list[Diagnosis]:
    return [each for each in findings if each.check == check]


def only(findings: Sequence[Diagnosis], check: str) -> Diagnosis:
    """The one finding of a check."""
    (found,) = named(findings, check)
    return found


def levels(findings: Sequence[Diagnosis], check: str) -> list[Level]:
    return [each.level for each in named(findings, check)]
