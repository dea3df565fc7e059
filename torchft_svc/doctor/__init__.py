"""Checks of a trainer's settings, its lighthouse, its network and its machine, before it runs."""
