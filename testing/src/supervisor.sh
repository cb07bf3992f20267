# Runs a server as long as a process holds our standard input open, then removes its directory. Arguments: the
# directory, the signal that stops the server, its command. Commands on standard input: "start", "stop", "stop SIGNAL";
# each is answered with its first word.
directory=$1
signal=$2
shift 2
child=
stop() {
    if [ -n "$child" ]; then
        kill -s "$1" "$child" 2> /dev/null
        wait "$child" 2> /dev/null
        child=
    fi
}
while read -r order with; do
    case $order in
        start) "$@" >> "$directory/log" 2>&1 < /dev/null & child=$! ;;
        stop) stop "${with:-$signal}" ;;
    esac
    echo "$order"
done
stop "$signal"
rm -rf "$directory"
