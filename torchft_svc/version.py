"""The version of this package; also read, without being run, by what builds it."""

VERSION = "0.1.0"
