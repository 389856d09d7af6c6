function __rankbench_complete
    set -l words (commandline -opc)
    set -l program $words[1]
    set -e words[1]
    $program __complete $words (commandline -ct | string collect --allow-empty) 2>/dev/null
end
complete -c rankbench -f -a '(__rankbench_complete)'
