"""Launchers: ways to start a script on several processes, written to be read."""
