"""Before `make` sets up an environment: refuses a Python that cannot, in one sentence, and removes what another made.

    python requirements/python.py FOLDER
    python requirements/python.py --is-another FOLDER      exits with 0 if another Python made it; does nothing else

It runs on any Python, Python 2 too.
"""

import os
import shutil
import sys

SUPPORTED = ((3, 11), (3, 12))  # as `requires-python` in pyproject.toml


def complaint(version, venv_works):
    """What is wrong with this Python, or None."""
    if version not in SUPPORTED:
        needed = " or ".join("%d.%d" % each for each in SUPPORTED)
        text = "gruppo needs Python %s; %s is Python %d.%d." % ((needed, sys.executable) + version)
        return text + " Another one is chosen so: make demo PYTHON=python%d.%d" % SUPPORTED[-1]
    if not venv_works:
        text = "%s cannot make a virtual environment. On Debian and Ubuntu: apt-get install python%d.%d-venv"
        return text % ((sys.executable,) + version)
    return None


def venv_works():
    try:
        import ensurepip  # Debian leaves it out of its Python; without it `venv` fails at its end
        import venv
    except ImportError:
        return False
    return bool(ensurepip and venv)


def made_by(folder):
    """The version of Python that made an environment, as "3.11"; "" if there is none."""
    try:
        with open(os.path.join(folder, "pyvenv.cfg")) as lines:
            written = dict(line.split(" = ", 1) for line in lines if " = " in line)
    except OSError:
        return ""
    return ".".join(written.get("version", "").split(".")[:2])


def remove(folder, this):
    """What keeps an environment of another Python from being made anew, or None once it is removed."""
    what = "%s was made by Python %s, and this is Python %s" % (folder, made_by(folder), this)
    ours = any(os.path.exists(os.path.join(folder, name)) for name in (".demo", ".ready"))
    if os.path.islink(folder) or not ours:
        return what + ": remove it, or name another folder: make demo VENV=FOLDER"
    sys.stdout.write(what + ": it is made anew.\n")
    shutil.rmtree(folder)
    return None


if __name__ == "__main__":
    folder, this = sys.argv[-1], "%d.%d" % sys.version_info[:2]
    is_another = made_by(folder) not in ("", this)
    if sys.argv[1] == "--is-another":
        sys.exit(not is_another)
    wrong = complaint(tuple(sys.version_info[:2]), venv_works())
    if is_another and not wrong:
        wrong = remove(folder, this)
    if wrong:
        sys.exit(wrong)
