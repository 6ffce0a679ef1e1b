"""The code that runs in the new process: a bare interpreter imports this package once per run.

    supervisor ── creates the namespaces
      └─ guard ── process 1 of its namespace; enforces the time limit, and kills all processes when the code has ended
           └─ the code, under its own uid, resource limits, Landlock and seccomp

Without a process namespace the supervisor is the guard, and orphans become its children. Start-up time matters here,
so only a few modules of the standard library are imported.
"""
