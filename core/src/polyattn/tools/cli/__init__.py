"""The command line: list, explain, doctor, run, bench."""
