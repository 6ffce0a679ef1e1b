"""What runs on the other side of the fork: this package is imported by a bare interpreter, once per run.

    supervisor ── makes the namespaces
      └─ guard ── process 1 of its namespace; keeps the clock, and ends every process when the code has ended
           └─ the code, under an own uid, resource limits, Landlock and seccomp

Without a process namespace the supervisor is the guard, and orphans become its children. Start-up time matters here: a
few modules of the standard library, and no more.
"""
