"""Parts of `PipelinedModel` and `transform`: checks of arguments, Keras' methods, inspection."""
