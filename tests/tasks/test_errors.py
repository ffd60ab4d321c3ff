"""What luigi logs of errors raised on purpose: their sentence, without what led to it."""

import logging
import traceback

import pytest

from pipeline.errors import SourceError
from tasks.runtime import shorten_errors


@pytest.fixture
def said(caplog):
    shorten_errors()
    logger = logging.getLogger("luigi-interface")

    def log(text):
        with caplog.at_level("WARNING", logger="luigi-interface"):
            logger.warning("Will not run it:\n%s", text)
        return caplog.records[-1].getMessage() if caplog.records else ""

    logger.addHandler(caplog.handler)
    yield log
    logger.removeHandler(caplog.handler)


def formatted(cause):
    try:
        try:
            raise cause
        except type(cause) as error:
            raise SourceError("cannot open", file="a", next_step="Look.\nAgain.") from error
    except SourceError:
        return traceback.format_exc()


@pytest.mark.parametrize("cause", [FileNotFoundError(2, "No such file"), KeyError("x")])
def test_an_error_with_a_cause_is_told_by_its_own_sentence(said, cause):
    assert said(formatted(cause)) == "Will not run it:\ncannot open; file a. Look.\nAgain.\n"


def test_an_error_of_ours_that_nobody_meant_keeps_its_traceback(said):
    text = formatted(KeyError("x")).replace("pipeline.errors.SourceError", "builtins.Surprise")
    assert "Traceback" in said(text)
