# Makes the plugins known where nothing of polyattn is installed: source it from the repository's root. An entry
# point for each of them; their sources are used where they lie.
root=$PWD
info=$(mktemp -d)
known() { # NAME: a plugin's folder
  mkdir -p "$info/polyattn_$1-0.1.0.dist-info"
  printf 'Metadata-Version: 2.1\nName: polyattn-%s\nVersion: 0.1.0\n' "$1" > "$info/polyattn_$1-0.1.0.dist-info/METADATA"
  printf '[polyattn.plugins]\n%s = polyattn_%s.hooks\n' "$1" "$1" > "$info/polyattn_$1-0.1.0.dist-info/entry_points.txt"
  PYTHONPATH=$root/plugins/$1/src${PYTHONPATH:+:$PYTHONPATH}
}
for plugin in ${PLUGINS:-cpu triton cuda}; do known "$plugin"; done
mkdir -p "$info/polyattn_models-0.1.0.dist-info"
printf 'Metadata-Version: 2.1\nName: polyattn-models\nVersion: 0.1.0\n' > "$info/polyattn_models-0.1.0.dist-info/METADATA"
printf '[polyattn.models]\nhuggingface = polyattn_models\n' > "$info/polyattn_models-0.1.0.dist-info/entry_points.txt"
mkdir -p "$info/polyattn_conformance-0.1.0.dist-info"
printf 'Metadata-Version: 2.1\nName: polyattn-conformance\nVersion: 0.1.0\n' > "$info/polyattn_conformance-0.1.0.dist-info/METADATA"
printf '[pytest11]\npolyattn-conformance = polyattn.conformance.plugin\n' > "$info/polyattn_conformance-0.1.0.dist-info/entry_points.txt"
export PYTHONPATH=$root/core/src:$root/integrations/models/src:$PYTHONPATH:$info PYTHONUNBUFFERED=1
