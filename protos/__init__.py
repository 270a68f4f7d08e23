"""The public API: the .proto files, and the code generated from them."""
