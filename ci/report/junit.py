"""The report of a check as JUnit XML: a suite for each machine, in it a test case for each clause."""

import re
from xml.dom import minidom

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from ci import Data
from ci.standard_streams import printable
from ci.report.text_output import changes


def text_of(data: Data) -> bytes:
    """Return the JUnit report of a check.

    A violation fails its clause for each machine that met it, unless the base shows it as well or a
    known fault explains it.

    data: see `check_data`.
    """
    base = data["base"] or {"implementation": "", "violates": []}
    violated = {c["id"]: (c, found) for found in data["findings"] for c in found["clauses"]}
    document = JUnitXml(f"kvspec check {data['implementation']}")
    for machine in data["clauses_by_machine"]:
        suite = TestSuite(f"kvspec {machine['machine']} on {data['implementation']}")
        suite.add_property("seed", str(data["seed"]))
        suite.add_property("tier", data["tier"])
        for clause in data["clauses"]:
            case = _case(machine, f"{clause['id']} {clause['title']}")
            if clause["id"] in base["violates"]:
                case.result = [Skipped(f"{base['implementation']} violates it as well")]
            elif clause["id"] in machine["violated"]:
                case.result = [_result(Failure, clause["id"], violated, data)]
            elif clause["waived"]:
                case.result = [Skipped(f"not checked: {clause['waived']}")]
            elif not machine["evaluated"].get(clause["id"]):
                case.result = [Skipped("never evaluated")]
            suite.add_testcase(case)
        if "BROKEN" in machine["violated"]:
            case = _case(machine, "BROKEN the system fails nowhere")
            case.result = [_result(Error, "BROKEN", violated, data)]
            suite.add_testcase(case)
        document.add_testsuite(suite)
    verdict = TestSuite("kvspec verdict")
    case = TestCase("verdict", "kvspec", data["seconds"])
    case.system_out = printable(data["verdict"])
    if data["exit_code"] and not data["findings"]:
        case.result = [Failure(printable(data["verdict"]))]
    verdict.add_testcase(case)
    document.add_testsuite(verdict)
    document.update_statistics()  # type: ignore[no-untyped-call]
    for suite, machine in zip(document, data["clauses_by_machine"]):
        suite.time = machine["seconds"]  # of its runs, in which all clauses are checked together
    text = re.sub(rb"[\x00-\x08\x0b-\x1f]", b" ", document.tostring())  # type: ignore[no-untyped-call]
    xml: bytes = minidom.parseString(text).toprettyxml(encoding="utf-8")
    return xml


def _case(machine: Data, name: str) -> TestCase:
    return TestCase(name, f"kvspec.{machine['machine']}")


def _result(
    kind: type[Failure] | type[Error],
    clause: str,
    violated: dict[str, tuple[Data, Data]],
    data: Data,
) -> Failure | Error | Skipped:
    """Return the result of a violated clause: skipped where known faults explain it."""
    if clause in violated and violated[clause][1]["known_elsewhere"]:
        return Skipped(violated[clause][1]["looked_up"]["text"])
    if clause in violated:
        return _violated_clause_case(kind, *violated[clause])
    known = [
        fault["id"] for fault in data["known"] if fault["times"] and clause in fault["clauses"]
    ]
    return Skipped(f"known: {', '.join(known) or 'beside a known fault'}")


def _violated_clause_case(kind: type[Failure] | type[Error], clause: Data, reported: Data) -> Failure | Error:
    """Return a violated clause: its sentence, and the smallest trace."""
    lines = [f"saved  {clause['saved']}", f"replay {reported['replay']}"] if reported["saved"] else []
    for row in reported["rows"]:
        mark = ">" if row["violates"] else " "
        text = "; ".join([row["outcome"], *changes(row)])
        lines.append(f"{mark} {row['step']:>3} {row['command']}: {text}")
    if (violation := reported["violation"]) is not None:
        lines += [f"expected {violation['expected']}", f"observed {violation['observed']}"]
    result = kind(printable(f"{clause['id']}: {clause['sentence']}"), clause["id"])
    result.text = "\n".join(map(printable, lines))
    return result
