# Completion of the program `paged` for bash; installed as share/bash-completion/completions/paged.
# Commands and options come from the program's own help, so there is nothing to keep in step.
_paged() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} program=${COMP_WORDS[0]}
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        mapfile -t COMPREPLY < <(compgen -W "$("$program" help 2>/dev/null | sed -n 's/^  \([a-z-]\{3,\}\) .*/\1/p')" -- "$word")
        return
    fi
    case $before in
    --model | -m | --config | --redis-password-file | --store | --file | --output | -o | --access-log)
        mapfile -t COMPREPLY < <(compgen -f -- "$word")
        return
        ;;
    esac
    case $word in
    -*)
        mapfile -t COMPREPLY < <(compgen -W "$("$program" "${COMP_WORDS[1]}" --help 2>/dev/null |
            grep -o -e '^ *\(-[a-z], \)\?--[a-z-]*' | grep -o -e '--[a-z-]*')" -- "$word")
        ;;
    *) mapfile -t COMPREPLY < <(compgen -f -- "$word") ;;
    esac
}
complete -o filenames -F _paged paged
