"""Used by all packages: units, tables of text, files of data, progress, private parts of Keras."""
