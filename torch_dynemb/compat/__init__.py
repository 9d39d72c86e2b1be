"""Names of other libraries, so that their users keep their code."""
