"""Many processes at once, within a time."""

import subprocess
import tempfile
import time


def side_by_side(commands, count, limit):
    """Run the commands, `count` at a time. Says how that went; what is not done after `limit` seconds is ended."""
    waiting, running, said = list(commands), [], []
    start = time.monotonic()
    while (waiting or running) and time.monotonic() - start < limit:
        while waiting and len(running) < count:
            command, log = waiting.pop(0), tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed when it has been read
            running.append((subprocess.Popen(command, stdout=log, stderr=log), command, log))
        for one in [one for one in running if one[0].poll() is not None]:
            running.remove(one)
            process, command, log = one
            if process.returncode:
                log.seek(0)
                said.append(f"{command[-1]} failed: {log.read().strip()[-400:]}")
            log.close()
        time.sleep(0.05)
    for process, command, log in running:
        process.kill()
        process.wait()
        log.close()
        said.append(f"{command[-1]} took too long")
    if waiting:
        said.append(f"{len(waiting)} were not begun")
    done = f"{len(commands) - len(said)} of {len(commands)} processes done in {time.monotonic() - start:.0f} s"
    return "\n".join([*said, done])
