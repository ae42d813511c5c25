from flashtrie_cli.cli import main

main()
