"""Code that tries to break out of a sandbox. It runs in one, to find out which protections work."""

SECRET = "gruppo-secret-7f3a"

# It reads its targets from stdin, prints a line `protection: how` for each attack that succeeds, and at the end
# `attacked: all`. The orphan it leaves keeps stdout open: if the orphan survived, the run would not end.
ATTACKS = (
    f"SECRET = {SECRET!r}\n"
    + """
import json, os, signal, socket, sys

target = json.load(sys.stdin)
folder, decoy = target["folder"], target["decoy"]
victim = folder + "/victim"


def attempt(protection, attack, *args):
    try:
        how = attack(*args)
    except (OSError, MemoryError):
        return
    if how:
        print(f"{protection}: {how}", flush=True)


def loopback(kind):
    with socket.socket(socket.AF_INET, kind) as server, socket.socket(socket.AF_INET, kind) as client:
        server.bind(("127.0.0.1", 0))
        if kind == socket.SOCK_STREAM:
            server.listen()
        client.settimeout(1)
        client.connect(server.getsockname())
        return "a connection over loopback"


def unix_socket():
    if os.path.exists(folder):  # else nothing of the machine is in sight, its sockets neither
        with socket.socket(socket.AF_UNIX):
            return "sockets of other programs can be reached"


def read(path):
    with open(path, "rb") as file:
        return SECRET.encode() in file.read() and f"{os.path.basename(path)} outside the sandbox was read"


def write(path, mode):
    with open(path, mode):
        return "a file outside the sandbox was opened for writing"


def memory_file():
    os.close(os.memfd_create("x"))
    return "memory outside of all address spaces can be had, which no limit counts"


def fork_beyond_limit():
    for _ in range(target["processes"] + 4):
        if os.fork() == 0:
            signal.pause()
    return "more processes than allowed"


def leave_an_orphan():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.pause()
        os._exit(0)
    os.wait()


attempt("network", loopback, socket.SOCK_STREAM)
attempt("network", loopback, socket.SOCK_DGRAM)
attempt("network", unix_socket)
attempt("reads", read, victim)
attempt("parent", read, f"/proc/{decoy}/environ")
attempt("writes", write, folder + "/new", "w")
attempt("writes", write, victim, "a")
attempt("writes", os.truncate, victim, 0)
attempt("writes", os.chmod, victim, 0o600)
attempt("writes", os.unlink, victim)
attempt("memory", lambda: bytearray(512 << 20) and "more memory than allowed")
attempt("memory", memory_file)
leave_an_orphan()
attempt("processes", fork_beyond_limit)
print("attacked: all", flush=True)
attempt("parent", os.kill, decoy, signal.SIGKILL)  # in a process namespace the number may be our own
"""
)
