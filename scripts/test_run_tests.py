#!/usr/bin/env python3
"""What run_tests.py reports of steps that fail."""

import io
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
import run_tests  # noqa: E402
from run_tests import Report, Step  # noqa: E402

# How long what must happen may take, in seconds.
PATIENCE = 600

FAILS = """
running 3 tests
test a::good ... ok
test a::bad ... FAILED
test a::says ... FAILED

failures:

---- a::bad stdout ----
printed before

thread 'a::bad' (13471) panicked at drivers/x.rs:178:17:
assertion `left == right` failed: rewrite
  left: %s
 right: 2
stack backtrace:
   0: never_shown

---- a::says stdout ----
Error: "no server"

failures:
    a::bad
    a::says

test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s
"""


def printing(name, text, status=0, **more):
    """A step that prints a text."""
    program = "import sys; sys.stdout.write(sys.argv[1]); sys.exit(int(sys.argv[2]))"
    return Step(name, [sys.executable, "-c", program, text, str(status)], **more)


def until(holds):
    """Waits for what must happen."""
    end = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > end:
            raise AssertionError("it never happens")
        time.sleep(0.01)


def is_alive(pid):
    """Whether a process runs. One that was ended, and that nobody has waited for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        # The second if it ends between the opening of the file and the reading.
        return False


class Reports(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.out = io.StringIO()
        self.report = Report(Path(self.folder.name), self.out)

    def lines(self, *steps, streams=1):
        """What is printed of these steps, and whether all is well."""
        run_tests.run_all(self.report, steps, streams)
        well = self.report.sums()
        return self.out.getvalue().splitlines(), well

    def test_a_line_a_step_and_the_sums(self):
        rust = "test result: ok. 3 passed; 0 failed; 1 ignored\ntest result: ok. 2 passed; 0 failed; 0 ignored\n"
        lines, well = self.lines(printing("rust", rust), printing("sdk", "4 passed, 0 failed\n"))
        self.assertTrue(well)
        self.assertRegex(lines[0], r"^ok +\d+ s +\d+ s CPU +5 passed  rust$")
        self.assertRegex(lines[1], r"^ok +\d+ s +\d+ s CPU +4 passed  sdk$")
        self.assertEqual(lines[-1], "9 passed, 0 failed")
        self.assertEqual(len(lines), 4)

    def test_a_program_without_tests_gets_no_line_unless_it_fails(self):
        none = "test result: ok. 0 passed; 0 failed; 0 ignored\n"
        lines, well = self.lines(printing("empty", none, program=True), printing("crashes", none, 3, program=True))
        self.assertFalse(well)
        self.assertFalse(any("empty" in line for line in lines))
        self.assertEqual(lines[-1], "0 passed, 1 failed")

    def test_the_last_lines_name_each_failed_test_and_why(self):
        lines, well = self.lines(printing("program", FAILS % ("x" * 20_000), 101), printing("after", "1 passed, 0 failed\n"))
        self.assertFalse(well)
        self.assertLessEqual(max(map(len, lines)), run_tests.WIDTH + 20)
        end = lines[lines.index("failed:"):]
        self.assertRegex(end[1], r"^  program \(.*01-program\.log\)$")
        self.assertEqual(end[2], "    a::bad")
        self.assertTrue(end[3].startswith("      thread 'a::bad' (13471) panicked at drivers/x.rs:178:17: assertion `left"))
        self.assertEqual(end[4:6], ["    a::says", '      Error: "no server"'])
        self.assertEqual(end[-1], "2 passed, 2 failed")
        self.assertNotIn("never_shown", "\n".join(lines))

    def test_a_step_that_dies_shows_its_last_words(self):
        dies = Step("dies", ["sh", "-c", "echo said this; kill -9 $$"])
        lines, well = self.lines(dies, Step("absent", ["/no/such/program"]))
        self.assertFalse(well)
        end = lines[lines.index("failed:"):]
        self.assertEqual(end[2:4], ["    it was ended by signal 9", "      said this"])
        self.assertIn("cannot run /no/such/program", end[6])
        self.assertEqual(end[-1], "0 passed, 2 failed")

    def test_a_step_whose_file_is_gone_has_failed_and_the_others_run(self):
        removes = Step("removes", ["rm", str(Path(self.folder.name, "01-removes.log"))])
        lines, well = self.lines(removes, printing("after", "1 passed, 0 failed\n"))
        self.assertFalse(well)
        end = lines[lines.index("failed:"):]
        self.assertEqual(end[2], "    its result is not known")
        self.assertIn("FileNotFoundError", end[3])
        self.assertEqual(end[-1], "1 passed, 1 failed")

    def test_a_second_run_in_the_same_folder_is_refused(self):
        place = Path(self.folder.name)
        with run_tests.alone(place):
            with self.assertRaises(SystemExit):
                run_tests.alone(place)
        run_tests.alone(place).close()

    def test_the_names_that_a_custom_harness_reports(self):
        mimic = "failures:\n\n---- sqlite::reads ----\nit was away\n\n\nfailures:\n    sqlite::reads\n\ntest result: FAILED. 0 passed; 1 failed\n"
        self.assertEqual(run_tests.failures(mimic, 101), [("sqlite::reads", "it was away")])

    def test_streams_run_beside_each_other_and_each_step_once(self):
        # Each waits for a file that the other makes.
        def meets(own, other):
            place = self.folder.name
            wait = f"touch {place}/{own}; until [ -e {place}/{other} ]; do sleep 0.05; done; echo 1 passed, 0 failed"
            return Step(own, ["sh", "-c", wait])

        lines, well = self.lines(meets("a", "b"), meets("b", "a"), printing("c", "1 passed, 0 failed\n"), streams=2)
        self.assertTrue(well)
        self.assertEqual(lines[-1], "3 passed, 0 failed")

    def test_busy_loops_run_beside_a_step_and_end_with_it(self):
        with run_tests.busy(2) as loops:
            self.assertEqual([loop.poll() for loop in loops], [None, None])
        self.assertEqual([loop.poll() for loop in loops], [-signal.SIGKILL] * 2)

    def test_a_run_that_is_terminated_or_interrupted_ends_its_loops_and_steps(self):
        # SIGINT is ignored in what a shell runs in the background. A start that takes long is what a busy machine does: the
        # step runs, and the run does not know it yet.
        program = """
import pathlib, signal, subprocess, sys, time
import run_tests

class Slow(subprocess.Popen):
    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        time.sleep(0.5)

subprocess.Popen = Slow
signal.signal(signal.SIGINT, signal.default_int_handler)

def work():
    with run_tests.busy(2) as loops:
        step = run_tests.Step("waits", ["sh", "-c", "echo $$; exec sleep 1000"])
        print(*(loop.pid for loop in loops), flush=True)
        run_tests.run_all(report, [step], 1)

report = run_tests.Report(pathlib.Path(sys.argv[1]))
sys.exit(run_tests.until_stopped(report, work))
"""
        for number in (signal.SIGTERM, signal.SIGINT):
            place = Path(self.folder.name, number.name)
            place.mkdir()
            run = subprocess.Popen([sys.executable, "-c", program, str(place)], cwd=Path(__file__).parent,
                                   stdout=subprocess.PIPE, text=True)
            try:
                pids = [int(pid) for pid in run.stdout.readline().split()]
                log = place / "01-waits.log"
                until(lambda: log.exists() and log.read_text().endswith("\n"))
                pids.append(int(log.read_text()))
                run.send_signal(number)
                self.assertEqual(run.wait(PATIENCE), 128 + number)
            finally:
                run.kill()
                run.stdout.close()
            self.assertEqual(len(pids), 3)
            for pid in pids:
                until(lambda: not is_alive(pid))

    def test_a_signal_that_does_not_wake_the_run_ends_it_too(self):
        # The signal comes to another thread than the one that waits for the steps: what waits is not woken, as where the
        # signal comes just before it begins to wait.
        program = """
import pathlib, signal, subprocess, sys, threading, time
import run_tests

class Signalled(subprocess.Popen):
    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        if threading.current_thread() is not threading.main_thread():
            # The run waits by then. It would end as well if it did not yet.
            time.sleep(0.5)
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

subprocess.Popen = Signalled
report = run_tests.Report(pathlib.Path(sys.argv[1]))
step = run_tests.Step("waits", ["sleep", "1000"])
sys.exit(run_tests.until_stopped(report, lambda: run_tests.run_all(report, [step], 1)))
"""
        run = subprocess.run([sys.executable, "-c", program, self.folder.name], cwd=Path(__file__).parent,
                             timeout=PATIENCE)
        self.assertEqual(run.returncode, 128 + signal.SIGTERM)

    def test_loops_end_with_a_run_that_is_killed(self):
        program = """
import time
import run_tests

with run_tests.busy(2) as loops:
    print(*(loop.pid for loop in loops), flush=True)
    time.sleep(1000)
"""
        run = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True)
        try:
            pids = [int(pid) for pid in run.stdout.readline().split()]
        finally:
            run.kill()
            run.wait()
            run.stdout.close()
        self.assertEqual(len(pids), 2)
        for pid in pids:
            until(lambda: not is_alive(pid))

    def test_programs_and_the_gateway_are_found_in_the_messages_of_cargo(self):
        def artifact(name, executable, test):
            return ('{"reason": "compiler-artifact", "executable": %s, "profile": {"test": %s}, "target": {"name": "%s"}}'
                    % (executable, test, name))

        lines = [artifact("lib", "null", "false"), artifact("http", '"/t/http"', "true"),
                 artifact("threadkeep", '"/t/threadkeep"', "false")]
        programs, gateway = run_tests.built([*lines, '{"reason": "build-finished", "success": true}'])
        self.assertEqual([program["executable"] for program in programs], ["/t/http"])
        self.assertEqual(gateway, "/t/threadkeep")
        failed = '{"reason": "build-finished", "success": false}'
        self.assertEqual(run_tests.built([*lines, failed]), ([], None))


if __name__ == "__main__":
    outcome = unittest.main(exit=False).result
    bad = len(outcome.failures) + len(outcome.errors)
    print(f"{outcome.testsRun - bad} passed, {bad} failed")
    sys.exit(bad != 0)
