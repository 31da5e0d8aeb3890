//! Plan files: safetensors with the settings as JSON in the header and the constants as tensors.

use crate::file::replace;
use crate::plan::{LayerConstants, Plan, PlanSpec};
use kvrs_codec::calibrated::{Array, Arrays};
use kvrs_core::{Error, Result};
use safetensors::tensor::{Metadata, TensorView};
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::io::Write;
use std::path::Path;

/// What the names of a calibration's arrays begin with.
const CALIBRATION: &str = "calibration.";
const FORMAT: &str = "kvrs-plan";
/// Version of the file's schema.
const VERSION: &str = "1";
/// Largest plan file that is read.
const MAX_BYTES: u64 = 1 << 32;

pub(crate) fn save(plan: &Plan, path: &Path) -> Result<()> {
    let spec = plan.spec();
    let json = serde_json::to_string(spec).map_err(|e| Error::Internal(e.to_string()))?;
    let header = [("format", FORMAT), ("version", VERSION), ("hash", plan.hash()), ("plan", &json)];
    let header: HashMap<String, String> = header.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
    let mut arrays = arrays_of("key_offset", spec, spec.key_offset.as_ref());
    arrays.extend(arrays_of("value_offset", spec, spec.value_offset.as_ref()));
    arrays.extend(spec.named_arrays().map(|(name, array)| {
        let bytes = array.values.iter().flat_map(|x| x.to_le_bytes()).collect();
        (format!("{CALIBRATION}{name}"), array.shape.clone(), bytes)
    }));
    let views = arrays
        .iter()
        .map(|(name, shape, bytes)| Ok((name.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes)?)))
        .collect::<std::result::Result<Vec<_>, safetensors::SafeTensorError>>();
    let bytes = views.and_then(|views| safetensors::serialize(views, Some(header)));
    let bytes = bytes.map_err(|e| Error::Internal(e.to_string()))?;
    replace(path, |file| {
        let failed =
            |e: std::io::Error| Error::Io { what: format!("writing {}", path.display()), got: e.to_string() };
        file.write_all(&bytes).map_err(failed)
    })
}

fn arrays_of(
    name: &str,
    spec: &PlanSpec,
    offset: Option<&LayerConstants>,
) -> Vec<(String, Vec<usize>, Vec<u8>)> {
    let layers = offset.into_iter().flatten().zip(&spec.shape.layers).enumerate();
    let present = layers.filter_map(|(i, (constants, shape))| Some((i, constants.as_ref()?, shape.kv_heads)));
    present
        .map(|(i, x, heads)| {
            let bytes = x.iter().flat_map(|x| x.to_le_bytes()).collect();
            (format!("{name}.{i}"), vec![heads, x.len() / heads], bytes)
        })
        .collect()
}

pub(crate) fn load(path: &Path) -> Result<Plan> {
    let what = path.display().to_string();
    let io = |e: std::io::Error| Error::Io { what: format!("reading {what}"), got: e.to_string() };
    let size = std::fs::metadata(path).map_err(io)?.len();
    if size > MAX_BYTES {
        return Err(Error::format(
            &what,
            format!("{size} bytes"),
            format!("a plan of at most {MAX_BYTES} bytes"),
        ));
    }
    let bytes = std::fs::read(path).map_err(io)?;
    parse(&what, &bytes)
}

pub(crate) fn parse(what: &str, bytes: &[u8]) -> Result<Plan> {
    let broken = |e: &dyn std::fmt::Display| Error::format(what, e, "a whole safetensors file");
    let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(|e| broken(&e))?;
    let mut spec = header(what, &metadata)?;
    let tensors = SafeTensors::deserialize(bytes).map_err(|e| broken(&e))?;
    spec.key_offset = constants(what, &tensors, "key_offset", &spec)?;
    spec.value_offset = constants(what, &tensors, "value_offset", &spec)?;
    if let Some(calibration) = &mut spec.calibration {
        calibration.arrays = calibrated(what, &tensors)?;
    }
    let known = |name: &str| {
        if let Some(name) = name.strip_prefix(CALIBRATION) {
            return spec.arrays().is_some_and(|arrays| arrays.contains_key(name));
        }
        [("key_offset.", &spec.key_offset), ("value_offset.", &spec.value_offset)].iter().any(
            |(prefix, layers)| {
                let layer = name.strip_prefix(prefix).and_then(|i| i.parse::<usize>().ok());
                layer.is_some_and(|i| layers.as_ref().is_some_and(|l| l.get(i).is_some_and(Option::is_some)))
            },
        )
    };
    if let Some(name) = tensors.names().into_iter().find(|name| !known(name)) {
        return Err(Error::format(
            what,
            format!("a tensor {name}"),
            "key_offset.LAYER, value_offset.LAYER and the arrays of a calibration",
        ));
    }
    let plan = Plan::new(spec)?;
    let hash = metadata.metadata().as_ref().and_then(|m| m.get("hash")).map_or("none", String::as_str);
    if hash != plan.hash() {
        return Err(Error::format(
            what,
            format!("hash {hash}"),
            format!("{}, that of its content", plan.hash()),
        ));
    }
    Ok(plan)
}

fn header(what: &str, metadata: &Metadata) -> Result<PlanSpec> {
    let field =
        |name: &str| metadata.metadata().as_ref().and_then(|m| m.get(name)).map_or("nothing", String::as_str);
    if field("format") != FORMAT {
        return Err(Error::format(what, format!("format {}", field("format")), format!("format {FORMAT}")));
    }
    if field("version") != VERSION {
        return Err(Error::format(
            what,
            format!("version {}", field("version")),
            format!("version {VERSION}"),
        ));
    }
    serde_json::from_str(field("plan")).map_err(|e| Error::format(what, e, "the settings of a plan as JSON"))
}

fn constants(
    what: &str,
    tensors: &SafeTensors<'_>,
    name: &str,
    spec: &PlanSpec,
) -> Result<Option<LayerConstants>> {
    let read = |layer: usize| -> Result<Option<Vec<f32>>> {
        let Ok(tensor) = tensors.tensor(&format!("{name}.{layer}")) else { return Ok(None) };
        let heads = spec.shape.layers[layer].kv_heads;
        if tensor.dtype() != Dtype::F32 || tensor.shape().len() != 2 || tensor.shape()[0] != heads {
            let got = format!("{name}.{layer} {:?} {:?}", tensor.dtype(), tensor.shape());
            return Err(Error::format(what, got, format!("float32 [{heads}, dim]")));
        }
        Ok(Some(numbers(tensor.data())))
    };
    let layers = (0..spec.shape.layers.len()).map(read).collect::<Result<LayerConstants>>()?;
    Ok(layers.iter().any(Option::is_some).then_some(layers))
}

fn calibrated(what: &str, tensors: &SafeTensors<'_>) -> Result<Arrays> {
    let mut arrays = Arrays::new();
    for (name, tensor) in tensors.iter() {
        let Some(short) = name.strip_prefix(CALIBRATION) else { continue };
        if tensor.dtype() != Dtype::F32 {
            return Err(Error::format(what, format!("{name} {:?}", tensor.dtype()), "float32"));
        }
        let array = Array::new(short, tensor.shape().to_vec(), numbers(tensor.data()).into())?;
        arrays.insert(short.to_owned(), array);
    }
    Ok(arrays)
}

fn numbers(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}
