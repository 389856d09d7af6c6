(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_rankbench_complete() {
    local -a all
    all=("${(@f)$("${words[1]}" __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    compadd -S '' -- ${(M)all:#*[=./,]}
    compadd -- ${all:#*[=./,]}
    [[ -n "$all" ]] || _files
}
compdef _rankbench_complete rankbench
