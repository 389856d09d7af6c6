_rankbench_complete() {
    local line="${COMP_LINE:0:COMP_POINT}" word words
    read -r -a words <<<"$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    word="${words[${#words[@]} - 1]}"
    mapfile -t COMPREPLY < <("${words[0]}" __complete "${words[@]:1}" 2>/dev/null)
    # a key, a group or a folder needs more text after it, so no space follows
    [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *[=./,] ]] && compopt -o nospace
    # bash replaces what follows the last = alone, where = ends words
    [[ "$COMP_WORDBREAKS" == *=* && "$word" == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%=*}="}")
}
complete -o default -F _rankbench_complete rankbench
