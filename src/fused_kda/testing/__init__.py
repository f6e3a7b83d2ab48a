"""Drawing whole calls of the op and judging what a backend made of them: for the tests, ``check`` and the bench."""
