"""What happened to a program: tables for people, and the text of every phase in files."""
