"""Tests of the command audit: planted mistakes, healthy programs, records, reports."""
