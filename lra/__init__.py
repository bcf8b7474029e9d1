"""The harness; its parts are listed in README."""

from lra.script import check_packages

check_packages()  # before any import that would fail for want of one
