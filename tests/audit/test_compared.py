"""benchmarks/audit_compared.py: two outputs of one program compare equal but for what is new."""

from benchmarks.audit_compared import shape


def test_a_line_keeps_its_code_and_loses_its_numbers() -> None:
    first = "/tmp/audit-a/3/train.py:45:12: B007 Loop control variable `epoch` not used"
    second = "/tmp/audit-b/plain/train.py:7:1: B007 Loop control variable `epoch` not used"
    assert shape(first) == shape(second)
    assert "B007" in shape(first)
    assert shape(first) != shape(second.replace("B007", "F841"))
    assert shape("[W1 reducer.cpp:9] took 1.5 s at 0x7f") == shape(
        "[W1 reducer.cpp:12] took 3 s at 0x1b"
    )
