"""The catalogue of mutations fits the sources and the tests; ``tests/mutations/run.py`` sees each of them go red."""

import ast

from mutations.catalogue import MUTATIONS, REPOSITORY

SUITES = REPOSITORY / "workers" / "txbox_testing" / "conformance"
"""What a class of tests may have inherited."""


def test_there_are_enough() -> None:
    assert len(MUTATIONS) >= 84
    assert len({(one.file, one.text, one.replacement) for one in MUTATIONS}) == len(MUTATIONS)


def test_each_finds_its_text_once_and_leaves_code_that_can_be_read() -> None:
    for mutation in MUTATIONS:
        source = (REPOSITORY / mutation.file).read_text()
        broken = mutation.apply(source)
        assert broken != source, mutation
        if mutation.file.endswith(".py"):
            ast.parse(broken, mutation.file)


def test_each_names_a_test_that_there_is() -> None:
    for mutation in MUTATIONS:
        file, _, test = mutation.test.partition("::")
        suite, _, name = test.rpartition("::")
        files = [REPOSITORY / file, *(SUITES.glob("*.py") if suite else ())]
        assert any(f"def {name.partition('[')[0]}" in each.read_text() for each in files), mutation
