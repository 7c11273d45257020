"""The `perfed` command."""

from perfed.cli.app import main as main
