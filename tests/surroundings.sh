#!/usr/bin/env bash
# The fast tests in surroundings that have little of what a developer's terminal has, all at once: an ordinary user, in
# the background (SIGINT and SIGHUP ignored, no terminal, no stdin), TERM=dumb, a copy without .git in a path with
# spaces, umask 077, the C locale, hardly a variable set, and proxies where nothing listens.
#
#   bash tests/surroundings.sh -m "not slow and not medium" -n 2     (arguments of pytest)
set -euo pipefail
umask 022
cd "$(dirname "$0")/.."

folder=$(mktemp -d "${TMPDIR:-/tmp}/gruppo surroundings.XXXXXX")
chmod 755 "$folder"
running=
trap '[ -z "$running" ] || kill -KILL -- "-$running" 2> /dev/null || true; rm -rf "$folder"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
checkout="$folder/a checkout" home="$folder/a home" temporary="$folder/a tmp"
mkdir "$checkout" "$home" "$temporary"
as_user=()
if [ "$(id -u)" = 0 ]; then
  as_user=(setpriv --reuid=65534 --regid=65534 --clear-groups env) # nobody; `env`, since setpriv itself may still open all
  chown 65534:65534 "$checkout" "$home" "$temporary"
fi
sed 's,/$,,; s,^/,./,' .gitignore | tar -c --exclude=./.git --exclude-from=- . |
  (umask 077 && "${as_user[@]}" tar -x --no-same-permissions -C "$checkout")

# The packages of .venv, less what points to this checkout, under an interpreter that the user can read: not root's own.
about() { .venv/bin/python -c "import sys, sysconfig; print($1)"; }
interpreter=
for candidate in "$(about sys.base_prefix)/bin" /usr/local/bin /usr/bin; do
  candidate+=/python$(about 'sysconfig.get_python_version()')
  [ -n "$interpreter" ] || ! "${as_user[@]}" "$candidate" -c "import venv" 2> /dev/null || interpreter=$candidate
done
if [ -z "$interpreter" ]; then
  echo "An ordinary user has no Python of .venv's version: install the system's." >&2
  exit 1
fi
"$interpreter" -m venv --without-pip "$folder/environment"
site="$(echo "$folder"/environment/lib/python*/site-packages)"
cp -al "$(about 'sysconfig.get_path("purelib")')/." "$site" 2> /dev/null ||
  cp -a "$(about 'sysconfig.get_path("purelib")')/." "$site" # no hard links: TMPDIR is on another disk
rm -rf "$site"/__editable__*
echo "$checkout" > "$site/gruppo.pth"

proxy=http://127.0.0.1:9
# `&` has SIGINT ignored, in a script. Of the variables, what is not named here is not set.
cd "$checkout"
(
  trap '' HUP
  umask 077
  exec setsid "${as_user[@]}" env -i PATH="$PATH" HOME="$home" TMPDIR="$temporary" TERM=dumb LC_ALL=C PYTHONUTF8=0 \
    PYTHONCOERCECLOCALE=0 http_proxy=$proxy https_proxy=$proxy all_proxy=$proxy HTTP_PROXY=$proxy HTTPS_PROXY=$proxy \
    ALL_PROXY=$proxy "$folder/environment/bin/python" -m pytest "$@"
) < /dev/null > "$folder/log" 2>&1 &
running=$!
tail --pid="$running" -n +1 -f "$folder/log"
wait "$running"
