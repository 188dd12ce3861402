#!/usr/bin/env bash
# A Ray head of this checkout, with a token: scripts/cluster.sh up|down|env|token
#
# up    makes .ray/token (readable by you alone), starts a head and waits until it takes jobs
# env   prints the variables that clients need: eval "$(scripts/cluster.sh env)"
# token makes the token alone, for `ray up cluster.yaml`
# down  ends this head and nothing else (`ray stop` ends every Ray of the user)
#
# Arguments after `up` go to `ray start`; PORT, HOST and DASHBOARD_PORT say where it listens, STATE is
# another folder than .ray. Other nodes join with
#   RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=<a copy of .ray/token> ray start --address=HEAD:PORT
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
state=${STATE:-$root/.ray}
export PATH=$root/.venv/bin:$PATH
HOST=${HOST:-127.0.0.1} PORT=${PORT:-6379} DASHBOARD_PORT=${DASHBOARD_PORT:-8265}

print_env() {
    echo "export RAY_AUTH_MODE=token"
    echo "export RAY_AUTH_TOKEN_PATH=$state/token"
    echo "export RAY_API_SERVER_ADDRESS=http://$HOST:$DASHBOARD_PORT"
}

make_token() {
    (umask 077; mkdir -p "$state"
     [ -s "$state/token" ] || python -c 'import secrets; print(secrets.token_hex(32), end="")' > "$state/token")
}

is_up() { [ -f "$state/pid" ] && kill -0 "$(cat "$state/pid")" 2>/dev/null; }

up() {
    if is_up; then echo "a head is running: process $(cat "$state/pid")" >&2; return 1; fi
    make_token
    eval "$(print_env)"
    setsid ray start --head --block --disable-usage-stats --port="$PORT" \
        --dashboard-host="$HOST" --dashboard-port="$DASHBOARD_PORT" "$@" \
        > "$state/log" 2>&1 < /dev/null &
    echo $! > "$state/pid"
    for _ in $(seq 120); do
        if ! is_up; then echo "the head has ended; its log:" >&2; tail -20 "$state/log" >&2; return 1; fi
        if ray job list > /dev/null 2>&1; then print_env; return; fi
        sleep 1
    done
    echo "the head takes no jobs after two minutes: $state/log" >&2
    return 1
}

down() {
    if ! is_up; then echo "no head of this checkout is running" >&2; return 0; fi
    pid=$(cat "$state/pid")
    kill -TERM "$pid"
    for _ in $(seq 20); do is_up || break; sleep 0.5; done
    kill -KILL -- "-$pid" 2>/dev/null || true # what outlived it, in its own process group
    rm -f "$state/pid"
}

case "${1:-}" in
    up) shift; up "$@" ;;
    down) down ;;
    env) print_env ;;
    token) make_token ;;
    *) sed -n '2,11p' "$0" >&2; exit 2 ;;
esac
