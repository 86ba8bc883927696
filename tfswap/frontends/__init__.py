"""What a user calls: the decorator, SavedModels, GraphDefs, Keras, the command line, simulation, profiles."""
