"""How model families write calls of functions: a parser each, which reads them out of a stream of text."""
