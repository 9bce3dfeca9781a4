# SPDX-License-Identifier: Apache-2.0
"""The probe module and the doctor that prints it."""

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from sennit import extras
from sennit.doctor import capabilities, doctor


@pytest.mark.parametrize("name", capabilities.PROBES)
def test_every_probe_answers_in_one_line(name: str) -> None:
    found = capabilities.probe(name)
    assert found.name == name
    assert found.detail
    assert "\n" not in found.detail
    if found.available:
        assert not found.remedy


@pytest.mark.needs("netns", "bpf")
def test_a_probe_that_does_not_end_is_an_answer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the doctor ended in a traceback."""
    monkeypatch.setattr(capabilities, "PROBE_TIMEOUT_S", 0.0)
    found = capabilities.PROBES["native-xdp"]()
    assert not found.available
    assert "did not end within 0 s" in found.detail
    made = capabilities.in_new_namespace("sleep", "60")
    assert (made.returncode, made.stderr) == (124, "sleep did not end within 0 s: a very busy machine")


def test_missing_names_the_first_missing_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> capabilities.Capability:
        return capabilities.Capability(name="absent", available=False, detail="not here")

    monkeypatch.setitem(capabilities.PROBES, "absent", absent)
    assert capabilities.missing("cores") is None
    assert capabilities.missing("cores", "absent") == "missing capability absent: not here"


def test_unknown_capability_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match="loopback-ipv6"):
        capabilities.probe("teleport")


def finding(*, required: bool, available: bool) -> doctor.Finding:
    remedy = "" if available else "build it"
    capability = capabilities.Capability(name="shm", available=available, detail="some detail", remedy=remedy)
    return doctor.Finding(
        question=capabilities.Question(title="a question", needs=("shm",), required=required),
        capabilities=(capability,),
    )


@pytest.mark.parametrize(
    ("required", "available", "healthy"), [(True, False, False), (False, False, True), (True, True, True)]
)
def test_only_required_questions_make_a_machine_unfit(required: bool, available: bool, healthy: bool) -> None:
    assert doctor.healthy([finding(required=required, available=available)]) is healthy


def test_report_says_what_to_do() -> None:
    out = io.StringIO()
    doctor.render([finding(required=True, available=False)], Console(file=out, width=60))
    text = out.getvalue()
    assert "a question" in text
    assert "some detail" in text
    assert "→ build it" in text
    assert "cannot run sennit yet" in text


def test_json_has_every_question_and_can_be_read_back() -> None:
    document = json.loads(json.dumps(doctor.as_json(doctor.examine())))
    assert [question["title"] for question in document["questions"]] == [item.title for item in capabilities.QUESTIONS]
    for question in document["questions"]:
        assert question["ok"] == all(capability["available"] for capability in question["capabilities"])


def test_a_wheel_is_not_asked_for_what_tests_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "from_checkout", lambda: False)
    asked = [found.question for found in doctor.examine()]
    assert asked == [question for question in capabilities.QUESTIONS if "tests" not in question.title]
    assert len(asked) < len(capabilities.QUESTIONS)


def test_the_testbed_adds_its_own() -> None:
    assert "vm" in capabilities.PROBES
    assert any(question.needs == ("vm",) for question in capabilities.QUESTIONS)
    program = (
        "from sennit.doctor import capabilities\n"
        "known = capabilities.PROBES.keys()\n"
        "assert all(known >= set(question.needs) for question in capabilities.QUESTIONS)\n"
        "assert 'vm' not in known, 'the product knows the testbed'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_questions_ask_for_known_capabilities() -> None:
    for question in capabilities.QUESTIONS:
        assert set(question.needs) <= capabilities.PROBES.keys()
