"""The observer: runs inside a foreign program, started by sitecustomize.py on its PYTHONPATH.

It imports the standard library only, changes no result, and never raises into the program.
"""
